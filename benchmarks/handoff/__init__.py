"""What a hand-off costs: bytes a second beside the machine's limits, and seconds beside none."""
