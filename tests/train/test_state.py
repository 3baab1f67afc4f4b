from nvfp4_train.train.state import TrainState


def test_advance_counts_steps_tokens_and_sequences():
    state = TrainState()
    state.advance(num_sequences=2, sequence_length=8)
    state.advance(num_sequences=3, sequence_length=8)
    assert state == TrainState(step=2, tokens=40, sequences=5)


def test_a_state_survives_a_checkpoint():
    state = TrainState(step=3, tokens=24, sequences=0)
    assert TrainState(**state.to_dict()) == state
