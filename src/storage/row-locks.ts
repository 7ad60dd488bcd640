// Locks that works hold until they end (`Tx.lock`), as rows. Unlike an advisory lock, a row tells a transaction of which
// all statements see one moment (repeatable read, serializable) that another one has been at work since that moment: it
// is undone and runs again, instead of going on with what it saw before it waited.

/**
 * Rows of a kind of lock. Names that fall on one row only wait for each other now and then, and the table never holds
 * more than this for each kind, so nothing has to be removed.
 */
const ROWS_OF_A_KIND = 65_536;

/** The change of the row is what tells the others: a row that was only locked would let them go on. */
const TAKE = `insert into locks as l (key, taken) values ($1, 1)
  on conflict (key) do update set taken = l.taken + 1`;

/** `payer:0x12…` and `ceiling:acme` never share a row, so that two kinds may be taken in one order everywhere. */
function rowOf(key: string): string {
  const kind = key.slice(0, key.indexOf(":") + 1);
  return `${kind}${Bun.hash.crc32(key) % ROWS_OF_A_KIND}`;
}

export const lockStatement = (key: string): [text: string, values: string[]] => [TAKE, [rowOf(key)]];
