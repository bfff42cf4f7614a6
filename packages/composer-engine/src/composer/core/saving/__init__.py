"""What is saved of a run: its encoding, components, weights and generators, and the comparison with what is loaded."""
