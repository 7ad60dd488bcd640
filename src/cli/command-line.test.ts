import { describe, expect, test } from "bun:test";
import { COMMANDS, SERVE } from "../commands.ts";
import { readCommandLine } from "./command-line.ts";

const readWords = (words: readonly string[]) => readCommandLine(words, COMMANDS, SERVE);
const read = (text: string) => readWords(text === "" ? [] : text.split(" "));
const plain = (text: string) => {
  const { command, words, flags, lists, problems } = read(text);
  return { command, words, flags: Object.fromEntries(flags), lists: Object.fromEntries(lists), problems };
};
const problems = (text: string) => read(text).problems;

test("without a command it serves", () => {
  expect(plain("")).toEqual({ command: "", words: [], flags: {}, lists: {}, problems: [] });
  expect(plain("--mode facilitator --port=0")).toMatchObject({
    command: "",
    flags: { mode: "facilitator", port: "0" },
    problems: [],
  });
});

test("help and the version are given wherever they are asked for", () => {
  const asked: [string, string[], Record<string, string>][] = [
    ["--help", [], { all: "" }],
    ["-h", [], { all: "" }],
    ["--mode gateway --help", [], { all: "" }],
    ["account --help", ["account"], {}],
    ["account add alice --help", ["account", "add"], {}],
    ["pki server --host -h", ["pki", "server"], {}],
    ["token --tenant a --help", ["token"], {}],
    ["token revoke -h", ["token", "revoke"], {}],
  ];
  for (const [text, words, flags] of asked) {
    expect([text, plain(text)]).toEqual([text, { command: "help", words, flags, lists: {}, problems: [] }]);
  }
  for (const text of ["account add --version", "--version", "-v", "version"])
    expect(read(text).command).toBe("version");
});

test("help on what is no command is refused with a hint", () => {
  expect(problems("tokn --help")).toEqual(["tokn is not a command; did you mean token?"]);
  expect(problems("account lst --help")).toEqual(["account lst is not a command; did you mean account list?"]);
});

test("serve may be named", () => {
  expect(plain("serve --port 0")).toMatchObject({ command: "serve", flags: { port: "0" } });
  expect(plain("serve --mode facilitator")).toMatchObject({ command: "serve", flags: { mode: "facilitator" } });
});

test("a flag that takes no value leaves the next word alone", () => {
  expect(plain("account remove --yes alice")).toMatchObject({ words: ["alice"], flags: { yes: "" }, problems: [] });
  expect(plain("backup --json copy.db")).toMatchObject({ words: ["copy.db"], flags: { json: "" }, problems: [] });
  expect(plain("backup --verify copy.db")).toMatchObject({ words: [], flags: { verify: "copy.db" } });
  expect(problems("account remove alice --yes=no")).toEqual(["--yes takes no value"]);
});

test("help takes a topic, several words, or none", () => {
  expect(plain("help")).toEqual({ command: "help", words: [], flags: {}, lists: {}, problems: [] });
  expect(plain("help payments")).toMatchObject({ command: "help", words: ["payments"], problems: [] });
  expect(plain("help how do I pay")).toMatchObject({ words: ["how", "do", "I", "pay"], problems: [] });
  expect(problems("hepl")).toEqual(["hepl is not a command; did you mean help?"]);
});

test("a command takes its words and flags in any order", () => {
  const expected = {
    command: "account add" as const,
    words: ["alice"],
    flags: { cert: "a.crt", "daily-ceiling": "5" },
    lists: {},
    problems: [],
  };
  expect(plain("account add alice --cert a.crt --daily-ceiling 5")).toEqual(expected);
  expect(plain("account add --cert=a.crt --daily-ceiling=5 alice")).toEqual(expected);
});

test("only some flags may be repeated", () => {
  expect(plain("pki server --dir d --host a --host=b")).toMatchObject({
    command: "pki server",
    flags: { dir: "d" },
    lists: { host: ["a", "b"] },
    problems: [],
  });
  expect(problems("pki server --dir d --dir e")).toEqual(["--dir may be given only once"]);
});

test("the value of a flag may look like anything but a long flag", () => {
  expect(plain("account add a --daily-ceiling -1 --cert -").flags).toEqual({
    "daily-ceiling": "-1",
    cert: "-",
  });
  expect(problems("account add a --cert --daily-ceiling 1")).toEqual(["--cert needs a value: --cert FILE"]);
  expect(plain("token --user=--x --tenant=").flags).toEqual({ user: "--x", tenant: "" });
});

test("a flag with a problem counts as given", () => {
  expect(plain("account add a --cert").flags).toEqual({ cert: "" });
  expect(plain("token revoke --all=yes --tenat a").flags).toEqual({ all: "yes" });
  expect(plain("pki init --dir d --dir e").flags).toEqual({ dir: "d" });
});

describe("a command line with problems", () => {
  const ACCOUNT = "the commands of account are add, list, disable, enable, remove, add-cert, remove-cert";
  const cases: [string, string[]][] = [
    ["tokn", ["tokn is not a command; did you mean token?"]],
    ["acount list", ["acount is not a command; did you mean account?"]],
    ["nonsense", ["nonsense is not a command; tollgate help nonsense looks for it in the manual"]],
    ["serv", ["serv is not a command; did you mean serve?"]],
    ["serve gateway", ["gateway is not expected here; did you mean --mode gateway?"]],
    ["account", [`account is not a command by itself; ${ACCOUNT}`]],
    ["account --cert x", [`account is not a command by itself; ${ACCOUNT}`]],
    ["account close", [`account close is not a command; ${ACCOUNT}`]],
    ["settlement", ["settlement is not a command by itself; did you mean settlement set?"]],
    ["token acme", ["acme is not expected here: this command takes flags only"]],
    ["settlement acme", ["settlement acme is not a command; the only command of settlement is set"]],
    ["token revok", ["token revok is not a command; did you mean token revoke?"]],
    ["rotate", ["rotate is not a command; did you mean keys rotate?"]],
    ["mode gateway", ["mode is not a command; did you mean --mode gateway?"]],
    ["port", ["port is not a command; did you mean --port N?"]],
    ["token rev --tenant a", ["token rev is not a command; did you mean token revoke?"]],
    ["tkoen", ["tkoen is not a command; did you mean token?"]],
    ["pka", ["pka is not a command; did you mean pki?"]],
    ["pay", ["pay is not a command; tollgate help pay looks for it in the manual"]],
    ["compl bash", ["compl is not a command; did you mean completion?"]],
    ["Start", ["Start is not a command; did you mean serve?"]],
    ["account lst", ["account lst is not a command; did you mean account list?"]],
    ["pki server client", ["client is not expected here: this command takes flags only"]],
    ["account disable", ["NAME is missing: tollgate account disable NAME"]],
    ["account disable a b", ["b is not expected here"]],
    [
      "account disable -a",
      ["-a is not a flag: flags begin with two hyphens", "NAME is missing: tollgate account disable NAME"],
    ],
    ["account list --cert x", ["--cert is not a flag of this command"]],
    [
      "account add --crt x",
      ["--crt is not a flag of this command; did you mean --cert?", "NAME is missing: tollgate account add NAME"],
    ],
    ["migrate -- x", ["--", "x"].map((word) => `${word} is not expected here: this command takes flags only`)],
    ["pki init --host a", ["--host is not a flag of this command"]],
    [
      "--mode gateway extra --prot 1 --host",
      [
        "extra is not expected here: this command takes flags only",
        "--prot is not a flag of this command; did you mean --port?",
        "--host needs a value: --host H",
      ],
    ],
  ];
  for (const [text, expected] of cases)
    test(`has all of them told: ${text}`, () => expect(problems(text)).toEqual(expected));

  test("has its words shown in one short line", () => {
    expect(readWords(["pki", "init", `\u001b[1m${"x".repeat(100)}`]).problems).toEqual([
      `\\u001b[1m${"x".repeat(36)} is not expected here: this command takes flags only`,
    ]);
  });

  test("knows no command by a name that every object has", () => {
    for (const name of ["constructor", "toString", "__proto__"]) expect(read(name).command).toBeNull();
  });
});
