// Ranks the pages for the words of the address, ?q=...: first the best three, then all by group.
// A page need not have every word; words are also found by their beginnings, and with a wrong letter.

const FIELDS = {heading: 5, synonyms: 5, title: 2, text: 1};
const GROUPS = {"Guides": 1.3, "Methods": 1.15, "Reference": 0.8, "Evidence and developing": 0.6};
const COMMON = new Set(("a an and are as at be by can do does for from get have how i in into is it me model my of on one or pytorch so " +
    "that the this to torch train training use using want what when where which while why with without").split(" "));

// The words of a text; those of EarlyStopper are earlystopper, early and stopper.
function tokenize(text) {
    return text.split(/[^\p{L}\p{N}]+/u).filter(word => word).flatMap(word => {
        const parts = word.split(/(?<=[\p{Ll}\p{N}])(?=\p{Lu})|(?<=\p{Lu})(?=\p{Lu}\p{Ll})/u);
        return parts.length > 1 ? [word, ...parts] : parts;
    });
}

// The stem of a word; those of stopping, stopper and stops are stop.
function stem(word) {
    const lower = word.toLowerCase();
    const short = lower.replace(/(ings?|ers?|ed|ions?|es|s|e)$/, "");
    return short.length < 3 ? lower : short.replace(/([bdfgmnprt])\1$/, "$1");
}

function wordsOf(query) {
    const words = tokenize(query);
    const rare = words.filter(word => !COMMON.has(word.toLowerCase()));
    return rare.length ? rare : words;
}

// Returns the best section of each page, with its score, the best first.
function findPages(sections, query) {
    const index = new MiniSearch({fields: Object.keys(FIELDS), tokenize, processTerm: stem});
    index.addAll(sections.map((section, id) => ({id, ...section})));
    const words = wordsOf(query);
    const wanted = new Set(words.map(stem));
    const options = {boost: FIELDS, prefix: word => word.length > 2, fuzzy: word => word.length > 5 ? 0.2 : false};
    const best = new Map();
    for (const hit of index.search(words.join(" "), options)) {
        const section = sections[hit.id];
        const share = new Set(hit.queryTerms).size / wanted.size;
        const score = hit.score * GROUPS[section.group] * share;
        if (score > (best.get(section.page)?.score ?? 0)) best.set(section.page, {...section, score});
    }
    return [...best.values()].sort((one, other) => other.score - one.score);
}

function list(place, title, found) {
    if (!found.length) return;
    const heading = document.createElement("h2");
    heading.textContent = title;
    const items = document.createElement("ul");
    items.className = "search";
    for (const section of found) {
        const link = document.createElement("a");
        link.href = `${section.page}.html${section.place ? `#${section.place}` : ""}`;
        link.textContent = section.title ? `${section.title}: ${section.heading}` : section.heading;
        const text = document.createElement("p");
        text.textContent = section.text;
        const item = document.createElement("li");
        item.append(link, text);
        items.append(item);
    }
    place.append(heading, items);
}

function showResults(place, query) {
    const found = findPages(SEARCHED, query);
    if (!found.length) place.textContent = "No page has one of these words.";
    list(place, "Best matches", found.slice(0, 3));
    for (const group of Object.keys(GROUPS)) {
        list(place, group, found.slice(3).filter(section => section.group === group).slice(0, 8));
    }
}

if (typeof document !== "undefined") {
    const query = new URLSearchParams(window.location.search).get("q") ?? "";
    for (const field of document.querySelectorAll("form.bd-search input")) field.value = query;
    if (query.trim()) showResults(document.getElementById("search-results"), query);
}
