"""The paper: equations 1 to 17 as pure functions of tensors."""
