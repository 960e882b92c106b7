"""The world around the captured program: its objects, what it reads of them and what it writes to them."""
