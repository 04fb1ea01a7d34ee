"""Pipeline stages, schedules and the executors that run them."""
