"""`refspec history`: parse, ask refspec.history, show."""
