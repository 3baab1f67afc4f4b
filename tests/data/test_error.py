import pickle

from nvfp4_train.data.error import DataError


def test_message_names_file_finding_expectation_and_fix():
    error = DataError("a/b.idx", found="3 bytes", expected="34 bytes", fix="copy it again")
    assert str(error).splitlines() == [
        "a/b.idx",
        "    found:    3 bytes",
        "    expected: 34 bytes",
        "    fix:      copy it again",
    ]


def test_error_crosses_process_borders():
    error = pickle.loads(pickle.dumps(DataError("p", found="f", expected="e", fix="x")))
    assert (error.path, error.found, error.expected, error.fix) == ("p", "f", "e", "x")
