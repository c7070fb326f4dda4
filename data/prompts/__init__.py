"""Prompts with their answers: JSON lines through templates, and tasks made of raw text."""
