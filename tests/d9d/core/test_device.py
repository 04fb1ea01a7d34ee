"""The device type of this machine, and the parts that are no-ops on CPU."""

import pytest
import torch

from d9d.core import device

CPU = torch.device("cpu")


def test_the_override_wins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    assert device.resolve_device_type() == "cpu"


def test_without_an_accelerator_it_is_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)
    found = torch.accelerator.current_accelerator(check_available=True)
    assert device.resolve_device_type() == ("cpu" if found is None else found.type)


def test_an_absent_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(device.DEVICE_VARIABLE, "abacus")
    with pytest.raises(ValueError, match=r"D9D_DEVICE=abacus: this machine offers cpu"):
        device.resolve_device_type()


def test_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"local rank 2 has no abacus device: this node has 2.*at most 2 processes"):
        device.local_device("abacus", 2)


def test_cpu_goes_over_gloo():
    assert device.local_device("cpu", 3) == CPU
    assert device.communication_backend("cpu") == "gloo"


def test_streams_and_copies_on_cpu():
    source = torch.arange(3.0)
    with device.side_stream(CPU) as stream:
        copy = device.HostCopy(source)
    source.zero_()
    device.join_stream(stream)
    device.synchronize(CPU)
    assert stream is None
    assert copy.read().tolist() == [0.0, 1.0, 2.0]


def test_random_state_can_be_put_back():
    state = device.random_state(CPU)
    first = torch.rand(4)
    device.set_random_state(CPU, state)
    assert torch.equal(torch.rand(4), first)
    device.set_random_state(CPU, state)


def test_counts_stay_exact_beyond_float32():
    total = torch.tensor(2.0**24, dtype=device.accumulator_dtype(CPU)) + 1
    assert total.item() == 2**24 + 1
