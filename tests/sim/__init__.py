"""Tests of fedsched.sim."""
