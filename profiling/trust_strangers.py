"""Ordinary scripts that nobody measured before."""
