"""Loads the test harness."""

pytest_plugins = ["tests.harness.plugin"]
