"""How many tokens each API key may use, and how many it has used."""
