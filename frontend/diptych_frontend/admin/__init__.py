"""The admin API of one engine: pause, sleep, weights, adapters, scale."""
