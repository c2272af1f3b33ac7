"""What people look at: tables, figures, report folders."""
