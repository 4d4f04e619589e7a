"""Tests of fedsched.policy."""
