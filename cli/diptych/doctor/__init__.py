"""`diptych doctor`: checks this machine, and which parts of Diptych will work on it."""
