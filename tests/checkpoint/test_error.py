import pickle

from nvfp4_train.checkpoint.error import CheckpointError


def test_it_travels_between_processes_with_its_message():
    error = pickle.loads(pickle.dumps(CheckpointError("step_00000001 was not saved")))
    assert isinstance(error, RuntimeError)
    assert str(error) == "step_00000001 was not saved"
