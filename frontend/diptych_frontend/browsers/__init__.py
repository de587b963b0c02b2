"""What browsers may send here, for which sites."""
