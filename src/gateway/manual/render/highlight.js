// Highlights the code of the manual's pages, in the languages that they use. It is JavaScript because the types of highlight.js
// would declare the browser's globals, and some of Bun's with other members, in the whole project.
import highlighter from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import typescript from "highlight.js/lib/languages/typescript";
import yaml from "highlight.js/lib/languages/yaml";

/** The exchanges of the examples: a request without a protocol version, its headers and its JSON body, and `→` before an answer. */
const exchange = (hljs) => ({
  name: "HTTP exchange",
  contains: [
    { scope: "keyword", begin: /^(GET|POST|PUT|PATCH|DELETE|→)(?= )/ },
    { scope: "number", begin: /(?<=^→ )\d{3}\b/ },
    { scope: "attr", begin: /^[A-Z][A-Za-z-]+(?=: )/ },
    { scope: "attr", begin: /"(\\.|[^"\\\n])*"(?=\s*:)/ },
    hljs.QUOTE_STRING_MODE,
    hljs.C_NUMBER_MODE,
    { scope: "literal", begin: /\b(true|false|null)\b/ },
  ],
});

/** Bash, whose list of commands has names such as `yes` and `dir`, which stand in our options. */
const shell = (hljs) => {
  const language = bash(hljs);
  return { ...language, keywords: { ...language.keywords, built_in: ["cd", "echo", "export", "printf", "umask"] } };
};

highlighter.registerLanguage("sh", shell);
highlighter.registerLanguage("js", javascript);
highlighter.registerLanguage("ts", typescript);
highlighter.registerLanguage("python", python);
highlighter.registerLanguage("json", json);
highlighter.registerLanguage("yaml", yaml);
highlighter.registerLanguage("http", exchange);

/** The code as HTML; null for a language that is none of these. */
export function highlight(code, language) {
  if (highlighter.getLanguage(language) === undefined) return null;
  return highlighter.highlight(code, { language, ignoreIllegals: true }).value;
}
