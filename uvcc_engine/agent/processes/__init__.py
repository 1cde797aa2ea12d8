"""The processes of a pod: forked workers and the zygote that they come from, relays, who is who."""
