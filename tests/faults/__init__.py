"""Faults that are injected into jobs and files, numbered as in the study of failures that these tests follow.

| | injection | here | elsewhere |
|---|---|---|---|
| D1 | SIGKILL for all ranks at random | `test_kills` | |
| D2 | SIGKILL at each point and collective of a save, for all ranks and for one | `test_kills` | |
| D3 | full disks | `test_storage` | `tests/d9d_lightning/test_checkpoint_safety.py` |
| D4 | bit flips, and files that are cut, zeroed, gone or exchanged | `test_damage` | `tests/d9d_lightning/test_checkpoint_safety.py` |
| D5 | resuming several times | `test_kills` | `tests/d9d/loop/run/test_exact_resume.py`, in Lightning \
`tests/d9d_lightning/test_checkpoint_folders.py` and `test_elastic_loader.py` |
| D6 | other meshes | | `tests/numerics/test_resume_matrix.py`, `tests/d9d_lightning/test_checkpoint_folders.py` |
| D7 | one rank raises, is killed, leaves or sleeps, at five places; native and in Lightning | `test_rank_failures` | \
`tests/d9d/core/test_failures.py`, `tests/d9d_lightning/test_failures.py` |
| D8 | SIGTERM in a forward pass, a backward pass and a save, and a second one | `test_preempted_fits` (Lightning) | \
`tests/d9d/loop/run/test_preemption.py` and `test_preempted_processes.py`, `tests/d9d_lightning/test_preemption.py` |
| D9 | ranks that disagree | | `tests/d9d/loop/run/test_job_agreement.py`, `tests/d9d/core/test_agreement.py`, in Lightning \
`tests/d9d_lightning/test_run_agreement.py`, `test_batch_agreement.py` and `test_log_agreement.py` |
| D10 | NaN and infinity on one rank, weights of zero | | `tests/d9d/loop/run/test_nonfinite.py`, \
`tests/d9d_lightning/test_nonfinite.py` |
| D11 | degrees that do not fit | | `tests/d9d/loop/run/test_job_check.py`, `tests/d9d/core/test_dist_context.py`, \
`tests/d9d/module/parallelism/test_mesh_check.py`, `tests/d9d_lightning/test_config_check.py` and `test_mesh_check.py` |
| D12 | hostile files | `test_damage` | `tests/d9d/checkpoint/test_safe_reader.py`, \
`tests/d9d_lightning/test_checkpoint_safety.py` |
| D13 | model states | | `tests/d9d/model_state` |
| D14 | pipelines | | `tests/d9d/loop/run/test_pipelined_training.py`, `tests/d9d/pipelining` |
| D15 | two jobs on a machine, two trainers in a process, what is left of them | `test_leftovers` | graphs and tensors: \
`tests/d9d/pipelining/test_executor.py`; sleep and wake: `tests/d9d/loop/component/test_sleeper.py`; wrong numbers of processes: `tests/d9d_lightning/test_launch.py` |
| D16 | storage that is slow, lies, or may not be written to | `test_storage` | `tests/d9d/loop/run/test_job_check.py`, \
`tests/d9d_lightning/test_checkpoint_safety.py` |
"""
