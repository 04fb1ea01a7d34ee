"""The parts of pipeline schedules under the import paths of earlier releases."""
