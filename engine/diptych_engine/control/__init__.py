"""What an owner may do to a running engine: pause it, let it sleep, reset and profile it."""
