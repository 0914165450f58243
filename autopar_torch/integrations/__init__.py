"""Trainers of other libraries, for models of this one. Import the one that you use."""
