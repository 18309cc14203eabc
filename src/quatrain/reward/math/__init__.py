"""Verdicts on mathematical answers."""
