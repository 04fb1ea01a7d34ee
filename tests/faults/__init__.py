"""Faults that are injected into jobs and files, numbered as in the study of failures that these tests follow.

D1, D2, D5 (native): `test_kills`. D3, D16: `test_storage`, and unwritable folders in `tests/d9d/loop/run/test_job_check.py`.
D4, D12: `test_damage`. D11: `tests/d9d/loop/test_config.py` and `tests/d9d/core/test_dist_context.py`.
D13: `tests/d9d/model_state`. D14: `tests/d9d/loop/run/test_pipelined_training.py` and `tests/d9d/pipelining`.
"""
