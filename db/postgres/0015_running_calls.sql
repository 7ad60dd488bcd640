-- Pages of running calls are SQLite's alone, as in ../sqlite: here several replicas share them, and look for their own.
select 1;
