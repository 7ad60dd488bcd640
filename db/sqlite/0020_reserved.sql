-- This number belongs to a change that is made beside this one, whose file takes the place of this one.
select 1;
