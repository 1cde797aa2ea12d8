"""What workers say beside the protocol: to the workers of other parties, and to whom they meet at the relay."""
