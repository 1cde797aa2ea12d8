"""Three-party replicated secret sharing over Z_2^64."""
