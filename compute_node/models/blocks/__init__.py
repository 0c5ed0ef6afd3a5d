"""What decoder layers are put together from: each function appends the ops of one block, or of a part of it."""
