"""Operations on embedding storage, one folder each: a public function with its contract, and its reference."""
