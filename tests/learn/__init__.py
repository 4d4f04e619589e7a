"""Tests of fedsched.learn."""
