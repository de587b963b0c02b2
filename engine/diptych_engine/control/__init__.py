"""Control of a running engine by its owner: pause, sleep, reset and profile."""
