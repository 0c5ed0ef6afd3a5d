"""Reading experts before anybody asks: hints, their order, what became of them, and when to stop."""
