// A unit of systemd as data. Of its form only what ours use: one setting a line, and some of them several times.

export interface Unit {
  /** Of a setting that is there once. */
  one(name: string): string;
  all(name: string): readonly string[];
  readonly names: readonly string[];
}

export function parseUnit(text: string): Unit {
  const settings = text.split("\n").flatMap((line): [string, string][] => {
    const [, name, value] = /^(\w+)=(.*)$/.exec(line) ?? [];
    return name === undefined ? [] : [[name, value ?? ""]];
  });
  const all = (name: string) => settings.filter(([each]) => each === name).map(([, value]) => value);
  return {
    one(name) {
      const [value, ...others] = all(name);
      if (value === undefined || others.length > 0) throw new Error(`${name} must be there once`);
      return value;
    },
    all,
    names: settings.map(([name]) => name),
  };
}
