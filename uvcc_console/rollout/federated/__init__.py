"""One domain's conductor among three: it drives its own pods and advances over signed barriers at the rendezvous."""
