"""What travels between a data owner and the parties: share components, and the boxes that only the addressee opens."""
