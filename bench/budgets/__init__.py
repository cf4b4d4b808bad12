"""The rows of DESIGN.md §8, one module for each way of measuring."""
