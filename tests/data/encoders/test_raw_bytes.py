from nvfp4_train.data.encoders.raw_bytes import ByteEncoder


def test_ids_are_bytes():
    (ids,) = ByteEncoder().encode(["a\N{EURO SIGN}\x00"])
    assert ids.tolist() == [0x61, 0xE2, 0x82, 0xAC, 0]


def test_end_is_not_text_and_broken_bytes_are_marked():
    assert ByteEncoder().decode([0x61, 0xE2, 256]) == "a\ufffd"
    assert ByteEncoder().special_id("<|endoftext|>") == 256
    assert ByteEncoder.vocab_size == 257
