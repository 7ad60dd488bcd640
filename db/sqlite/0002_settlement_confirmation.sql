-- From when on no reorganisation changes by which transaction a collected payment was collected. It is asked about once
-- more then.
alter table payments add column final_at integer;
