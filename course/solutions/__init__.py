"""Solutions of the exercises, with answers to the open questions."""
