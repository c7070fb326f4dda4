"""Prompts with answers: JSON lines through templates, and tasks made from raw text."""
