-- Stands for another version until that is merged.
select 1;
