import hashlib

import numpy as np
import pytest
import torch

from zinf.training.token_data import (
    TokenData,
    check_sizes,
    training_batch,
    validation_batches,
)

TEXT = bytes(range(200)) * 5
DATA = TokenData.from_tokens(np.frombuffer(TEXT, dtype=np.uint8))


def test_the_first_nine_tenths_train_and_the_rest_validates():
    assert DATA.train.tobytes() == TEXT[:900]
    assert DATA.validation.tobytes() == TEXT[900:]
    assert DATA.fingerprint == hashlib.sha256(TEXT).hexdigest()


def test_targets_are_the_next_bytes_of_the_text():
    tokens, targets = training_batch(DATA, seed=3, step=5, batch=4, seq=16)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == torch.int64
    for row, after in zip(tokens.tolist(), targets.tolist(), strict=True):
        window = bytes(row) + bytes(after[-1:])
        assert window in TEXT[:900]
        assert after == row[1:] + after[-1:]


def test_a_batch_depends_on_seed_and_step_alone():
    def batch(seed, step):
        return training_batch(DATA, seed=seed, step=step, batch=4, seq=16)[0]

    assert torch.equal(batch(1, 2), batch(1, 2))
    assert not torch.equal(batch(1, 2), batch(1, 3))
    assert not torch.equal(batch(1, 2), batch(2, 2))


def test_every_window_of_the_training_text_can_be_drawn():
    data = TokenData.from_tokens(np.arange(10, dtype=np.uint32))  # 9 to train on: windows of 8 start at 0 or 1
    starts = {training_batch(data, seed=0, step=s, batch=1, seq=7)[0][0, 0].item() for s in range(50)}
    assert starts == {0, 1}


def test_validation_windows_span_the_part_from_end_to_end():
    batches = validation_batches(DATA, batches=2, batch=3, seq=10)
    firsts = [row[0].item() for tokens, _ in batches for row in tokens]
    assert firsts[0] == DATA.validation[0]
    assert batches[-1][1][-1, -1].item() == DATA.validation[-1]
    assert len(firsts) == 6
    assert np.diff(firsts).min() > 0


@pytest.mark.parametrize(
    ("batch", "seq", "words"),
    [(1, 100, "101 bytes of validation"), (1, 900, "901 bytes of training"), (31, 30, "930 bytes")],
)
def test_sizes_that_the_text_cannot_serve_are_refused(batch, seq, words):
    with pytest.raises(ValueError, match=words):
        check_sizes(DATA, batch=batch, seq=seq, unit="byte")


def test_sizes_that_just_fit_are_accepted():
    check_sizes(DATA, batch=9, seq=99, unit="byte")
