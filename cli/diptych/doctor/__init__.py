"""`diptych doctor`: what this machine has, and what of Diptych will work on it."""
