"""Grids to complete: Sudoku, mazes, ARC."""
