"""Tests of the project itself: layers, pages, packaging."""
