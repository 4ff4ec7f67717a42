"""From a place in a program to a sentence. All wording of failures lives here."""
