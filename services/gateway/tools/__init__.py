"""Tool calls in chat answers: the notations of models, their parsers and their grammars."""
