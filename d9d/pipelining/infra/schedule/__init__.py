"""Pipeline schedules under the import paths of earlier releases."""
