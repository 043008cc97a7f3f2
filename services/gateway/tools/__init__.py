"""Tool calls in chat answers: how models write them, how they are read, and their grammars."""
